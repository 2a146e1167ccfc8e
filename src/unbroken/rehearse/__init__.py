"""`unbroken rehearse`: kills a training on purpose, resumes it, and names the first thing that differs."""
