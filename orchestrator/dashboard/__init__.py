"""`isthmus dashboard`: runs on this machine in a browser, as they go on. It changes nothing."""
