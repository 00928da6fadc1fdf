"""What tests of several folders share: proxies, faults and the commands of a job under test."""
