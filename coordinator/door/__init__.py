"""Where requests come in: read, checked, admitted and answered, for the model that is served now."""
