"""Other frameworks on our tunnels and pools. Each needs its extra; nothing in here is imported by the rest."""
