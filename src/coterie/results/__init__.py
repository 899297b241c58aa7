"""What runs leave: their files, rows and findings, as the report and the commands read them."""
