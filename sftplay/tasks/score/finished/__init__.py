"""What a finished run of task score is used for: both turns typed or in files, and who learned what."""
