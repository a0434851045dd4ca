"""Measurements of a deployment, one file per question; `td-serve bench` runs them."""
