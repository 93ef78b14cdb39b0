"""What becomes of values and rows on their way from the source: hidden, filtered, renamed, computed, routed."""
