"""The dashboard: a small server that reads run directories and one static page that shows them. It writes nothing."""
