"""First specs: a model made small, calls that it takes, and the file that says so."""
