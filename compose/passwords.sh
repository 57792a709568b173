#!/bin/sh
# Gives every empty NAME= of .env a random value of 32 letters and digits; what is set stays. Run in the project's folder.
set -eu
umask 077
file=${1:-.env}
while IFS= read -r line; do
	case $line in
	[A-Z]*=) printf '%s%s\n' "$line" "$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')" ;;
	*) printf '%s\n' "$line" ;;
	esac
done <"$file" >"$file.new"
mv "$file.new" "$file"
