"""Pipeline schedules to look at: as their instructions say, and as ranks have carried them out."""
