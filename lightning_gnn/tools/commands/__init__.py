"""What ``lightning-gnn`` does beside fit, validate, test and predict."""
