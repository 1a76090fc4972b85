"""Floor 6: processes, placement and device leases."""
