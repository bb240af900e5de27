"""Features that attach to the core, a folder each; the core imports none of them."""
