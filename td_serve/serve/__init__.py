"""The Ray Serve deployment: ingress, coordinator, replicas, directory."""
