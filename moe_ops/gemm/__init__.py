"""Matrix products over routed rows."""
