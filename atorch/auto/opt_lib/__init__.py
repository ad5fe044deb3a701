"""The methods, one a file. Importing this package registers them all."""

