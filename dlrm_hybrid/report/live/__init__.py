"""One page about one run, made again and again while it goes on."""
