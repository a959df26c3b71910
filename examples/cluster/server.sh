# The server: listens, says where, and is there until both clients have measured.

# Where the others reach this host: what its worker says, else all members are on one host.
host=127.0.0.1
tab=$(printf '\t')
gradient-cluster roster > roster
while IFS="$tab" read -r member worker endpoint marks; do
    echo "$member on $worker"
    case ",$marks," in *,me,*) test "$endpoint" = - || host=$endpoint ;; esac
done < roster

"$PYTHON" -I -S "$SOURCE/stream.py" serve "$host" port &
trap 'kill $!' EXIT
until test -s port; do
    kill -0 $! || exit 1
    sleep 0.05
done

gradient-cluster send address "$host $(cat port)" --to client
echo "listening on $host $(cat port)"
gradient-cluster barrier connected --timeout 120
gradient-cluster barrier measured --timeout 120
echo "both clients have measured" > "$out"
