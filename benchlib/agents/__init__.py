"""What stands between the supervisor here and ranks elsewhere: submits a job, follows it, takes it back."""
