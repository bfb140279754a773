"""Programs that act for a run on other machines: they submit jobs and run pods."""
