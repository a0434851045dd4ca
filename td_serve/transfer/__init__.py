"""KV transfer between engines: ports, transports, leases."""
