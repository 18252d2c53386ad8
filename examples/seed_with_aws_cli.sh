#!/usr/bin/env bash
# Compute prompts on this machine, and upload the stored objects with the AWS CLI.
#
#   examples/seed_with_aws_cli.sh MODEL PROMPTS.jsonl FOLDER s3://bucket/kv [options of kvshelf seed]
#
# Run it again after adding prompts: only the new ones are computed, only their objects uploaded.
# Credentials, region and endpoint are those of the AWS CLI: AWS_PROFILE, AWS_ENDPOINT_URL, …
set -euo pipefail

if [ $# -lt 4 ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
model=$1 prompts=$2 folder=$3 url=${4%/}
shift 4

kvshelf seed "$prompts" --model "$model" --shelf "$folder" "$@"

# Quarantined objects stay here.
sync=(aws s3 sync "$folder" "$url" --exclude '*.kvshelf/*' --no-progress)
echo "uploaded $("${sync[@]}" | grep -c '^upload:' || true) files to $url"
echo "a second upload brings $("${sync[@]}" | grep -c '^upload:' || true)"

# kvshelf uses the same configuration, and lists the objects in the bucket.
kvshelf ls "$url" --long
