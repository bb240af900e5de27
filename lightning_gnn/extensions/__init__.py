"""Optional features, one folder each; the core imports none of them."""
