"""Pipeline parallelism: consecutive layers on consecutive ranks."""
