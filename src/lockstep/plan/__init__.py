"""Will it fit, which layout, how long is a step: predicted from shapes, machines and a few named constants."""
