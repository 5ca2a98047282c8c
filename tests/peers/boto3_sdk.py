"""What AWS' SDK gets over connections that sign for it.

usage: boto3_sdk.py CALL…, where a CALL is a function of this file. For each it prints a line of JSON: the status, and
what the SDK made of the answer. The addresses, and keys that are none, are in the environment.
"""

import io
import json
import sys
import urllib.error
import urllib.request

import boto3
from botocore.exceptions import ClientError


def put_object():
    return s3().put_object(Bucket="reports", Key="drafts/a b (1)+ä.txt", Body=b"hello")


def upload_file():
    s3().upload_fileobj(io.BytesIO(b"x" * 200_000), "reports", "drafts/long")
    return {"ResponseMetadata": {"HTTPStatusCode": 200}}


def list_objects():
    answer = s3().list_objects_v2(Bucket="reports", Prefix="drafts/a b+", Delimiter="/")
    return answer | {"seen": [found["Key"] for found in answer["Contents"]]}


def get_object():
    answer = s3().get_object(Bucket="reports", Key="drafts/long")
    return answer | {"seen": answer["Body"].read().decode()}


def presigned():
    address = s3().generate_presigned_url("get_object", Params={"Bucket": "reports", "Key": "drafts/long"})
    try:
        status = urllib.request.urlopen(address).status
    except urllib.error.HTTPError as error:
        status = error.status
    return {"ResponseMetadata": {"HTTPStatusCode": status}}


def get_item():
    answer = boto3.client("dynamodb").get_item(TableName="orders", Key={"id": {"S": "1"}})
    return answer | {"seen": answer["Item"]["id"]["S"]}


def delete_table():
    return boto3.client("dynamodb").delete_table(TableName="orders")


def s3():
    return boto3.client("s3")


def main(*calls):
    for call in calls:
        try:
            answer = globals()[call]()
        except ClientError as error:
            answer = error.response
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        print(json.dumps({"status": status, "seen": answer.get("seen")}))


main(*sys.argv[1:])
