"""How long tests wait for what must come."""

PATIENCE_S = 600.0
"""Only a test that fails waits so long: a machine whose cores are busy takes ten times as long as
usual."""
