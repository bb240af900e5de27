"""Out-of-core training: ranks of one machine that compute in turns under a shared memory limit."""
