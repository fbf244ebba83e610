"""Runs whose processes Ray places: the driver, and a rank. Nothing else imports ray."""
