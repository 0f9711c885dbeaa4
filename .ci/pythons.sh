# Sourced: which Python an interpreter is, and where one of a version is, also among pyenv's.

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

python_of() { # the first interpreter of a version such as 3.12
  local candidate
  for candidate in python"$1" ~/.pyenv/versions/"$1".*/bin/python; do
    if [ "$(version_of "$candidate" || true)" = "$1" ]; then
      echo "$candidate"
      return
    fi
  done
  return 1
}
