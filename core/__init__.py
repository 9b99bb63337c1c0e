"""What every floor stands on: errors, progress, JSON fields, files and folders that are never half-written."""
