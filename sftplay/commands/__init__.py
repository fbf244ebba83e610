"""What each verb of the command line does; every module here is imported only when its verb runs."""
