# A client: waits for the server's address and for the other client, then measures beside it.

address=$(gradient-cluster recv address --from server:0 --timeout 120)
echo "client $GRADIENT_CLUSTER_INDEX: the server listens on $address"
gradient-cluster barrier connected --timeout 120

# The address is two words, host and port.
"$PYTHON" -I -S "$SOURCE/stream.py" measure $address "$MEASURE_SECS" > measured.json
cat measured.json

# The first client's success ends the attempt, so it waits until the other has measured too.
gradient-cluster barrier measured --timeout 120
cp measured.json "$out"
