"""From parameters to one frozen config; profiles of clusters."""
