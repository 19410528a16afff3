"""The default beside every other way to compute all cases, in runs that compile all anew."""
