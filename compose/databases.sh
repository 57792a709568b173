# The first start of Postgres: a role and a database of its own for the ledger, for Prefect and for MLflow.
# Sourced by the image's entry point, under its `set -e`; it sets POSTGRES_USER, and .env the passwords.

sao_database() { # NAME PASSWORD
	psql -v ON_ERROR_STOP=1 -v name="$1" -v password="$2" -U "${POSTGRES_USER:-postgres}" -d postgres <<-'SQL'
		CREATE ROLE :"name" LOGIN PASSWORD :'password';
		CREATE DATABASE :"name" OWNER :"name";
		REVOKE ALL ON DATABASE :"name" FROM PUBLIC;
	SQL
}

sao_database sao "${SAO_DB_PASSWORD:?}"
sao_database prefect "${PREFECT_DB_PASSWORD:?}"
sao_database mlflow "${MLFLOW_DB_PASSWORD:?}"
