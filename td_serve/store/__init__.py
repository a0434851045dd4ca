"""What is kept of KV between rounds, and how."""
