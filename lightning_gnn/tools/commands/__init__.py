"""Commands of ``lightning-gnn`` in addition to fit, validate, test and predict."""
