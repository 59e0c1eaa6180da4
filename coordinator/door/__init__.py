"""The entry of requests: they are read, checked, admitted and answered, for the model that is served now."""
