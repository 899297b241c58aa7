"""What is to be seen in each picture, in words with numbers."""
