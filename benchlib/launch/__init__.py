"""From a plan to ranks that run and end: launchers, supervisor, nodes, diagnosis. No torch."""
