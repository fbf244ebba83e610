# Prints the targets of the Makefile with the text behind their ## marks.
BEGIN { FS = ":.*## "; print "SFT-Play: make TARGET [CONFIG=file] [ARGS=\"a.b=c ...\"]" }
/^##@ / { printf "\n%s\n", substr($0, 5) }
/^[a-z][a-z0-9-]*:.*## / { printf "  %-22s %s\n", $1, $2 }
