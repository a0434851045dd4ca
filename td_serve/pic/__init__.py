"""Position-independent reuse: which of the shared tokens are computed anew, one rule a file."""
