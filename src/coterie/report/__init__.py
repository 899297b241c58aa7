"""What a person looks at: tables, progress and pictures."""
