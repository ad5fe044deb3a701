"""Pipeline parallelism for any model: cut into stages by its structure, and run by torch's schedules."""
