"""Reports: one plain record per case, and what is made of the records: terminal matrix, JSON, Markdown."""
