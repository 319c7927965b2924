"""The lessons: a folder each, in the order of the numbers in their manifests."""
