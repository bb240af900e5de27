"""The strategy that all schemes share: ranks, steps, checks, and the contract of a scheme."""
