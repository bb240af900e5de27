"""Base strategy of all schemes: ranks, steps, checks, and the interface of a scheme."""
