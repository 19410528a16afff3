"""One decision for all processes of a job."""
