{{- define "rollmill.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The services that are on, as YAML: name to its values and the kind of its workload. */}}
{{- define "rollmill.services" -}}
{{- $kinds := dict "capture" "StatefulSet" "builder" "StatefulSet" "evaluator" "Deployment" "reward-merger" "StatefulSet" "batcher" "StatefulSet" "ledger" "Deployment" -}}
{{- $found := dict -}}
{{- range $name, $service := .Values.services -}}
{{- if $service.enabled -}}
{{- $_ := set $found $name (merge (dict "kind" (get $kinds $name)) (deepCopy $service)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* Labels that select a service's pods; of a dict with root and name. */}}
{{- define "rollmill.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{- define "rollmill.labels" -}}
{{ include "rollmill.selector" . }}
app.kubernetes.io/part-of: rollmill
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "rollmill.image" -}}
{{- $image := .root.Values.image -}}
{{- /* What is no service of its own is a command that every image has. */ -}}
{{- $name := ternary "builder" .name (has .name (list "topics" "ledger")) -}}
{{ printf "%s%s-%s:%s" $image.registry $image.repository $name (default .root.Chart.AppVersion $image.tag) }}
{{- end -}}

{{/* Number of processes of a service that has a fixed one; 1 of the batcher (rule B1). */}}
{{- define "rollmill.replicas" -}}
{{- if hasKey .service "replicas" -}}{{ int .service.replicas }}{{- else -}}1{{- end -}}
{{- end -}}

{{/* What a setting is in the environment. Numbers of values are floats, which print large ones with an exponent. */}}
{{- define "rollmill.value" -}}
{{- if or (kindIs "map" .) (kindIs "slice" .) -}}{{ toJson . }}
{{- else if kindIs "invalid" . -}}none
{{- else if and (kindIs "float64" .) (eq (floor .) .) -}}{{ printf "%.0f" . }}
{{- else -}}{{ . }}
{{- end -}}
{{- end -}}

{{/* Settings of Kafka that are no secret, as a map of environment variables. */}}
{{- define "rollmill.kafkaEnvironment" -}}
{{- $kafka := .Values.kafka -}}
ROLLMILL_BOOTSTRAP_SERVERS: {{ required "kafka.bootstrapServers is missing: where is Kafka?" $kafka.bootstrapServers | quote }}
ROLLMILL_SECURITY_PROTOCOL: {{ $kafka.securityProtocol }}
{{- if hasPrefix "SASL" $kafka.securityProtocol }}
ROLLMILL_SASL_MECHANISM: {{ $kafka.saslMechanism }}
{{- end }}
{{- if hasSuffix "SSL" $kafka.securityProtocol }}
ROLLMILL_TLS_CHECK_HOSTNAME: {{ $kafka.tls.checkHostname | quote }}
{{- if $kafka.tls.ca }}
ROLLMILL_TLS_CA_FILE: /etc/rollmill/kafka/ca.crt
{{- end }}
{{- if $kafka.tls.clientCertificate }}
ROLLMILL_TLS_CERTIFICATE_FILE: /etc/rollmill/kafka/tls.crt
ROLLMILL_TLS_KEY_FILE: /etc/rollmill/kafka/tls.key
{{- end }}
{{- end }}
{{- range $name, $value := .Values.settings }}
ROLLMILL_{{ upper $name }}: {{ include "rollmill.value" $value | quote }}
{{- end }}
{{- end -}}

{{/* Those that are, as a list of container variables. */}}
{{- define "rollmill.kafkaSecrets" -}}
{{- $kafka := .Values.kafka -}}
{{- if hasPrefix "SASL" $kafka.securityProtocol }}
- name: ROLLMILL_SASL_USERNAME
  valueFrom: { secretKeyRef: { name: {{ include "rollmill.kafkaSecret" . }}, key: {{ $kafka.keys.username }} } }
- name: ROLLMILL_SASL_PASSWORD
  valueFrom: { secretKeyRef: { name: {{ include "rollmill.kafkaSecret" . }}, key: {{ $kafka.keys.password }} } }
{{- end }}
{{- if and (hasSuffix "SSL" $kafka.securityProtocol) $kafka.tls.keyPassword }}
- name: ROLLMILL_TLS_KEY_PASSWORD
  valueFrom: { secretKeyRef: { name: {{ include "rollmill.kafkaSecret" . }}, key: {{ $kafka.keys.keyPassword }} } }
{{- end }}
{{- end -}}

{{- define "rollmill.kafkaSecret" -}}
{{ required (printf "kafka.existingSecret is missing: %s needs it" .Values.kafka.securityProtocol) .Values.kafka.existingSecret }}
{{- end -}}

{{/* "true" where files of the Secret have to be mounted. */}}
{{- define "rollmill.kafkaFiles" -}}
{{- $tls := .Values.kafka.tls -}}
{{- if and (hasSuffix "SSL" .Values.kafka.securityProtocol) (or $tls.ca $tls.clientCertificate) }}true{{- end -}}
{{- end -}}

{{- define "rollmill.kafkaVolume" -}}
{{- $kafka := .Values.kafka -}}
- name: kafka
  secret:
    secretName: {{ include "rollmill.kafkaSecret" . }}
    defaultMode: 0440
    items:
      {{- if $kafka.tls.ca }}
      - { key: {{ $kafka.keys.ca }}, path: ca.crt }
      {{- end }}
      {{- if $kafka.tls.clientCertificate }}
      - { key: {{ $kafka.keys.certificate }}, path: tls.crt }
      - { key: {{ $kafka.keys.key }}, path: tls.key }
      {{- end }}
{{- end -}}

{{- define "rollmill.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "rollmill.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{- define "rollmill.sandboxed" -}}
{{- if dig "sandbox" "enabled" false .service }}true{{- end -}}
{{- end -}}
