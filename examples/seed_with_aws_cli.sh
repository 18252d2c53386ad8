#!/usr/bin/env bash
# Compute prompts on this machine, and upload what was stored with the AWS CLI.
#
#   examples/seed_with_aws_cli.sh MODEL PROMPTS.jsonl FOLDER s3://bucket/kv [options of kvshelf seed]
#
# Run it again after adding prompts: only the new ones are computed, only their objects uploaded.
# Credentials, region and endpoint as the AWS CLI takes them: AWS_PROFILE, AWS_ENDPOINT_URL, …
set -euo pipefail

if [ $# -lt 4 ]; then
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
model=$1 prompts=$2 folder=$3 url=${4%/}
shift 4

kvshelf seed "$prompts" --model "$model" --shelf "$folder" "$@"

# What engines set aside as damaged stays here.
sync=(aws s3 sync "$folder" "$url" --exclude '*.kvshelf/*' --no-progress)
echo "uploaded $("${sync[@]}" | grep -c '^upload:' || true) files to $url"
echo "a second upload brings $("${sync[@]}" | grep -c '^upload:' || true)"

# The same configuration serves kvshelf: objects are looked at where they are now.
kvshelf ls "$url" --long
