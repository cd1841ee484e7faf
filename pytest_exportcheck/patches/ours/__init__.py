"""Our patches, one module per reason."""
