"""FindingStorage: the database that keeps measurements for the next process."""
